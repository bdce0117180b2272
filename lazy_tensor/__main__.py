"""`python -m lazy_tensor`: runs `cli/main.py`, or `cli/checks.py` where recording is off.

`cli/main.py` uses names that a torch which fails the checks may lack, so it must not be imported
there.
"""

from lazy_tensor.dispatch.torch_checks import assumptions

if assumptions.failed():
    from lazy_tensor.cli.checks import main
else:
    from lazy_tensor.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
