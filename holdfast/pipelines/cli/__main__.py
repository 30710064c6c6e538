"""`python -m holdfast.pipelines.cli`: the command `holdfast`."""

from holdfast.pipelines.cli.entry import main

main()
