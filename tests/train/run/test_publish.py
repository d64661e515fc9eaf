"""Models on a hub: what is refused before training, what arrives after it, and what is said where it does not."""

import pytest
from huggingface_hub import constants

from exgrpo.train import main as program
from exgrpo.train.common import process
from exgrpo.train.common.errors import ConfigError, OutputError
from exgrpo.train.config.hub import check_upload, upload
from exgrpo.train.config.options import OutputConfig
from exgrpo.train.config.recipe import parse_args, to_yaml
from tests.train.hub import running


@pytest.fixture
def hub(monkeypatch):
    with running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)  # the name that was HF_TOKEN's before
        monkeypatch.setenv("HF_TOKEN", hub.token)
        # What huggingface_hub has read of the environment already.
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def pushing(name="me/mine", **options):
    return OutputConfig(push_to_hub=name, **options)


def test_the_repository_is_made_before_training_and_is_private_unless_asked(hub):
    check_upload(OutputConfig())
    assert not hub.private
    check_upload(pushing())
    check_upload(pushing("me/open", private=False))
    assert hub.private == {"me/mine": True, "me/open": False}


@pytest.mark.parametrize(
    ("options", "token", "message"),
    [
        ({"save_model": False}, "secret", "output.save_model=False does not save"),
        ({"name": "mine"}, "secret", "'mine' is not OWNER/NAME"),
        ({"name": "me/mi ne"}, "secret", "me/mi ne cannot be made: .*; mend that, or leave it out"),
        ({}, "other", "me/mine cannot be made: .*401"),
        ({}, "", "needs a token: run `hf auth login` or set HF_TOKEN"),
    ],
    ids=["no model", "no owner", "name", "token", "no token"],
)
def test_what_could_not_be_uploaded_is_refused_before_training(hub, monkeypatch, tmp_path, options, token, message):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=f"^output.push_to_hub.*{message}"):
        check_upload(pushing(**options))
    assert not hub.private


def test_a_hub_that_cannot_be_reached_is_named_before_training(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")  # it is not asked
    with pytest.raises(ConfigError, match="^output.push_to_hub: HF_HUB_OFFLINE is set: see that the hub can be"):
        check_upload(pushing())


def folders(tmp_path):
    for name in ("model", "best"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "README.md").write_text(f"---\ntags: [{name}]\n---\n")
        (tmp_path / name / "weights").write_bytes(bytes(range(256)) + name.encode())
    return {".": tmp_path / "model", "best": tmp_path / "best"}


def test_an_upload_that_fails_says_how_to_do_it_by_hand(hub, tmp_path):
    hub.full = True
    of_run = folders(tmp_path / "my run")
    with pytest.raises(OutputError, match="507") as error:
        upload("me/mine", of_run)
    assert str(error.value).endswith(
        f"on disk: hf upload me/mine '{of_run['.']}' . && hf upload me/mine '{of_run['best']}' best"
    )
    assert "\n" not in str(error.value)


def test_a_finished_run_that_is_started_again_tries_its_upload_again(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(process, "stop_on_signals", lambda: None)
    of_run = folders(tmp_path / "mine")
    options = [f"--output.folder={tmp_path}", "--output.name=mine", "--output.push_to_hub=me/mine"]
    (tmp_path / "mine" / "config.yaml").write_text(to_yaml(parse_args(options)))
    (tmp_path / "mine" / "finished").touch()
    hub.full = True
    assert program.main([*options, "--resume=auto"]) != 0
    assert "the models are whole on disk" in capsys.readouterr().err
    hub.full = False
    assert program.main([*options, "--resume=auto"]) == 0
    assert f"uploaded to {hub.address}/me/mine" in capsys.readouterr().out
    assert hub.files == {
        **{name: (of_run["."] / name).read_bytes() for name in ("README.md", "weights")},
        **{f"best/{name}": (of_run["best"] / name).read_bytes() for name in ("README.md", "weights")},
    }
    assert hub.private == {"me/mine": True}  # it may be asked for only now
