"""`python -m prorl_trio`: the `prorl-trio` command."""

from prorl_trio.cli import main

if __name__ == "__main__":
    main(prog_name="python -m prorl_trio")
