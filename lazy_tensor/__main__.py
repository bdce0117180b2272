"""`python -m lazy_tensor`: see `cli/main.py`."""

from lazy_tensor.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
