"""Every process reads the rows of its own devices, whatever the order of the mesh, and no number changes."""

import functools
import json
import sys

import numpy as np
import pytest
from support import feed_rows
from support.tiny_run import finish_pair, session_of, start_pair, write_corpus

from moe_jax.training.loop import evaluate


def test_two_processes_read_their_own_rows(tmp_path):
    """Five meshes on two processes; held-out losses on two of them equal those of one process to rounding."""
    write_corpus(tmp_path / "corpus")
    want = {}
    for name in feed_rows.EVALUATED:
        session = feed_rows.session_of(tmp_path, name)
        step, params, counted = session.evaluation_step(), session.fresh_state()["params"], []
        want[name] = evaluate(session, step, params, after_batch=functools.partial(counted.append, 1))
        batches = list(session.feed.held_out())
        assert len(counted) == len(batches) > 0  # the stall clock hears of every batch
        for batch in batches:  # the targets that count, summed on the devices
            weighed = int(step(params, session.feed.to_devices(batch), session.tables)[1])
            assert weighed == int(np.sum(batch.weights)) > 0
    for code, out, err in finish_pair(start_pair([sys.executable, feed_rows.__file__, str(tmp_path)])):
        assert code == 0, err[-4000:]
        lines = [line.split() for line in out.splitlines()]
        found = dict(words for words in lines if words and words[0] in want)
        assert found.keys() == want.keys()
        for name, loss in found.items():
            # collectives between processes sum in another order
            assert float(loss) == pytest.approx(want[name], rel=1e-6), name


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_documents_kept_apart(tmp_path, kind):
    """Numbers of documents and weights of targets, next to a loop over the tokens; the mask of BERT hides no end."""
    texts = tmp_path / "a.jsonl"
    texts.write_text("\n".join(json.dumps({"text": "x" * (3 + i % 11)}) for i in range(300)))
    changes = (f"DataConfig.path = {str(texts)!r}", "ModelConfig.document_mask = True", f"ModelConfig.kind = {kind!r}")
    feed = session_of(tmp_path, 4, *changes, "train.grad_accum_steps = 2").feed
    for batch in (feed.read(1), next(feed.held_out())):
        documents, ends = np.zeros_like(batch.documents), batch.targets if kind == "bert" else batch.inputs
        inside = np.ones(batch.documents.shape, bool)
        for at in np.ndindex(documents.shape[:2]):
            for column in range(1, documents.shape[2]):
                documents[at][column] = documents[at][column - 1] + (ends[at][column - 1] == 256)
            inside[at] = kind == "bert" or batch.inputs[at] != 256
        assert documents.dtype == np.int32 and documents.max() > 1
        np.testing.assert_array_equal(batch.documents, documents)
        assert not batch.weights[~inside].any() and (kind == "bert" or batch.weights[inside].all())
    targets, found = np.concatenate([b.targets[b.weights > 0] for b in feed.held_out()]), feed.bits_per_byte(np.log(2))
    assert found is None if kind == "bert" else found == pytest.approx(targets.size / np.sum(targets < 256))


def test_a_held_out_window_is_masked_the_same_in_any_batch_on_any_mesh(tmp_path):
    seen = []
    for devices, rows in ((1, 3), (4, 8)):
        changes = ("ModelConfig.kind = 'bert'", f"train.batch_size = {rows}", "train.evaluate_windows = 0")
        batches = list(session_of(tmp_path, devices, *changes).feed.held_out())
        names = ("inputs", "weights")
        whole = [np.concatenate([getattr(batch, name)[0] for batch in batches]) for name in names]
        seen.append([array[whole[1].any(axis=1)].tolist() for array in whole])
    assert seen[0] == seen[1] and len(seen[0][0]) > 8
