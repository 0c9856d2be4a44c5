"""One run's whole configuration: gin files and bindings in, one checked record out."""
