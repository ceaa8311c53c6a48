"""Where results go."""

import pytest

from wanfit.errors import OutputError
from wanfit.pipeline.outputs import check_output, whole_file


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", r"is a folder \(stage: input\)\. Give the name of a file, such as .*result\.json"),
        ("a.safetensors", "does not end in .json"),
        ("none/a.json", "does not exist .*Create it first"),
    ],
)
def test_what_cannot_take_a_result(tmp_path, name, said):
    with pytest.raises(OutputError, match=said):
        check_output("report", tmp_path / name, ".json")


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("older")
    with pytest.raises(OSError, match="full"), whole_file(path) as unfinished:
        unfinished.write_text("half")
        raise OSError("full")
    assert path.read_text() == "older" and list(tmp_path.iterdir()) == [path]
    with whole_file(path) as unfinished:
        unfinished.write_text("new")
        assert path.read_text() == "older"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
