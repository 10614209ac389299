"""Write the generated pages of docs/. A test fails while they differ from the code: `make docs` mends it."""

from pathlib import Path

from asyncrl.reference import configuration_page, fields_page

PAGES = {"fields.md": fields_page, "configuration.md": configuration_page}


def main() -> None:
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
