"""Run the `prorl-trio` command as `python -m prorl_trio.cli`."""

from prorl_trio.cli import main

if __name__ == "__main__":
    main()
