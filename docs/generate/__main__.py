"""`python -m docs.generate`: write every page of docs/reference/ anew, and name those that have changed."""

from __future__ import annotations

import os

import django

from docs.generate.pages import FOLDER, PAGES


def main() -> None:
    """Write the pages. Commands import models, so some site has to be there: the demo."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    django.setup()
    FOLDER.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote docs/reference/{name}")


if __name__ == "__main__":
    main()
