"""Random programs, run eagerly and lazily side by side."""
