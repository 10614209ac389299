"""Write the generated pages of docs/, and the generated parts of data-protocol.md. A test fails while they differ from the code:
`make docs` mends it."""

from pathlib import Path

from asyncrl.protocol_page import fill
from asyncrl.reference import configuration_page


def main() -> None:
    folder = Path(__file__).parent
    (folder / "configuration.md").write_text(configuration_page(), encoding="utf-8")
    protocol = folder / "data-protocol.md"
    protocol.write_text(fill(protocol.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
