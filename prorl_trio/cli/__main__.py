"""`python -m prorl_trio.cli`: the same as the `prorl-trio` command."""

from prorl_trio.cli import main

if __name__ == "__main__":
    main()
