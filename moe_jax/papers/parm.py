"""Parm (Pan, Lin, Shi, Chu, Sun, Li; INFOCOM 2024): its tables and figures, priced on its two testbeds.

Rows and the paper's numbers (section VI unless said otherwise):

    table_3     valid runs of 4,374 combinations: 1,296; speed-up of one layer 1.13 to 5.77 (abstract)
    figure_1    share of communication in 324 layers on 32 GPUs (section I): no number in the text
    figure_6    alpha and beta of the collectives: no number in the text
    hit_rate    how often equations 13 and 14 choose the shorter schedule: no number in the text
    s2_wins     layers in which S2 is shorter: some are, no number in the text
    table_4     mean speed-ups by (N_MP, N_ESP): S1 2.1 to 4.19 (testbed A), 2.46 to 5.77 (B); S2 1.99 to 4.12, 2.2 to
                5.38; Parm 2.1 to 4.2, 2.46 to 5.77; cells are not in the text. On A there is one with S1 3.21, S2 3.72
    over_worse  Parm over the worse of S1 and S2: 8% (A), 10.5% (B); SAA over AAS 1.09%, 1.12%
    figure_7    speed-ups on 32 GPUs: mean 4.91, above 4 in 89% of the layers; which N_MP and N_ESP is not in the text
    table_5     iteration of BERT-Base and GPT-2: 2.98 to 3.15; cells are not in the text

Assumed where the text is silent, before the first result: K = 2 (GShard); float32 (PyTorch's default); E = N_EP, as
section VI-D's 2 and 8 experts on 8 and 32 GPUs are with N_ESP = 4; P of {8, 16, 32} on testbed B, and 8 on A; N_MP and
N_ESP are 4 in figures 1 and 7 and table V.
"""
