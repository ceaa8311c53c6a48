"""`wanfit doctor` from the command line."""

import json

from wanfit.cli.main import main


def test_it_reads_this_machine(capsys, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:true")
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("software", "torch", "kernels", "allocator", "RAM", "with a capital"):
        assert word in said


def test_json_is_json(capsys, tmp_path):
    assert main(["doctor", "--json", "--models", str(tmp_path)]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {"topic", "state", "text"} == findings[0].keys()
    assert any(f["topic"] == "disk" and f["state"] == "unread" for f in findings)
