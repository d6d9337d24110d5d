"""`torchcaps demo [RUN]`: the page in the browser."""

from __future__ import annotations


def show_page(
    runs: tuple[str, ...] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    share: str = "no",
    space: str | None = None,
) -> int:
    """Open a page in the browser: draw a digit, see which capsules read it, turn it, bend it.

    Everything stays on this computer: nothing is fetched, and nobody else can open the page unless told otherwise.

    Args:
        runs: folders of finished runs; the networks that come with torchcaps are there in any case.
        host: 127.0.0.1 is for this computer alone, 0.0.0.0 for all that can reach it.
        port: 0 takes one that is free.
        share: yes gives a public address through Gradio's servers, for a week.
        space: write this folder for a model hub instead, with app.py and the first of the runs, if there is any.
    """
    from torchcaps.demo import serve
    from torchcaps.demo.space import write_space

    if share not in ("yes", "no"):
        raise ValueError(f"share is yes or no, got {share!r}")
    if space is not None:
        print(write_space(space, runs))
        return 0
    serve(runs, host=host, port=port, share=share == "yes")
    return 0
