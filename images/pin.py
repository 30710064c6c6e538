"""Puts the digests of pushed images into an overlay: python images/pin.py OVERLAY REGISTRY/holdfast@sha256:...

`images/build.sh` tags, you push, and the registry answers with the digest (`docker push` prints it). The overlay's
`images` then name the image of each manifest by that digest. An existing digest is replaced; all other
lines of the overlay stay as they are.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_REFERENCE = re.compile(
    r"(?P<place>[a-z0-9][\w.:/-]*?/)?(?P<name>holdfast(?:-[a-z-]+)?)@(?P<digest>sha256:[0-9a-f]{64})"
)
_ENTRY = re.compile(r"^ *- \{name: (?P<name>[\w-]+), newName: [^,]+, digest: \"sha256:[0-9a-f]{64}\"\}\n", re.MULTILINE)


def pinned(text: str, references: list[str]) -> str:
    """The text of a kustomization whose images are these. Raises ValueError."""
    entries = {}
    for reference in references:
        found = _REFERENCE.fullmatch(reference)
        if found is None:
            raise ValueError(
                f"{reference}: give an image of Holdfast by its digest, REGISTRY/holdfast@sha256:<64 digits>"
            )
        name = (found["place"] or "") + found["name"]
        entries[found["name"]] = f'  - {{name: {found["name"]}, newName: {name}, digest: "{found["digest"]}"}}\n'
    if re.search(r"^images:", text, re.MULTILINE) is None:
        text = text.rstrip("\n") + "\nimages:\n"
    if re.search(r"^images:\n", text, re.MULTILINE) is None:
        raise ValueError("the overlay has `images:` on one line; write it as a list, one image a line")
    text = _ENTRY.sub(lambda found: "" if found["name"] in entries else found[0], text)
    return re.sub(
        r"^images:\n",
        lambda found: found[0] + "".join(entries[name] for name in sorted(entries)),
        text,
        flags=re.MULTILINE,
    )


def main() -> int:
    """Write the overlay's kustomization.yaml."""
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)  # noqa: T201
        return 2
    file = Path(sys.argv[1]) / "kustomization.yaml"
    try:
        file.write_text(pinned(file.read_text(encoding="utf-8"), sys.argv[2:]), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"images/pin.py: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
