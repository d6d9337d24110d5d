"""`torchcaps demo [RUN]`: the page in the browser."""

from __future__ import annotations


def show_page(
    runs: tuple[str, ...] = (),
    *,
    host: str = "127.0.0.1",
    port: int | str = 7860,
    share: bool = False,
    space: str | None = None,
) -> int:
    """Open a page in the browser: draw a digit, see which capsules read it, turn it, bend it.

    Everything stays on this computer: nothing is fetched, and nobody else can open the page unless told otherwise.

    Args:
        runs: folders of finished runs; the networks that come with torchcaps are there in any case.
        host: 127.0.0.1 is for this computer alone, 0.0.0.0 for all that can reach it.
        port: 0 takes one that is free.
        share: a public address as well, through Gradio's servers, for a week.
        space: write this folder for a model hub instead, with app.py and the run, if one is named.
    """
    from torchcaps.demo import serve
    from torchcaps.demo.space import write_space

    if not isinstance(port, int):
        raise ValueError(f"a port is a number from 0 to 65535, got {port!r}")
    if space is not None:
        print(write_space(space, runs))
        return 0
    serve(runs, host=host, port=port, share=share)
    return 0
