import pytest

from actors.save_tensors import SaveTensors
from actors.session import Session, prepare_folders
from scenarios.errors import UserError
from scenarios.loader import load_scenario

SMOKE = "scenarios/smoke/ep2_dp.yaml"


def named(*names):
    return [load_scenario(SMOKE, overrides=[f"name={name}"]) for name in names]


def test_one_scenario_has_the_folder_itself_and_several_have_one_each(tmp_path):
    assert prepare_folders(named("a"), tmp_path) == [tmp_path]
    assert prepare_folders(named("a", "b"), tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert (tmp_path / "b").is_dir()


def test_the_command_to_reproduce_says_each_setting_once():
    session = Session(
        overrides=("platform=sm90", "batch.tokens=[5, 3]"), injects=("tokens_swapped",)
    )
    words = session.reproduce("x.yaml", ["platform=sm90", "topology=dp"]).split(" run.py ")[1]
    assert words == (
        "x.yaml --set platform=sm90 --set 'batch.tokens=[5, 3]' --set topology=dp "
        "--inject tokens_swapped"
    )


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "none.yaml").write_text("sweep: none\n")
    with pytest.raises(UserError, match=r"(?s)empty\.yaml: 1 problem.*none\.yaml: 2 problem"):
        Session().load([str(tmp_path)])


@pytest.mark.parametrize(
    ("save", "setting", "saved"),
    [
        ("failed", "inject=[]", False),
        ("failed", "inject=[tokens_swapped]", True),
        ("all", "inject=[]", True),
        ("none", "inject=[tokens_swapped]", False),
    ],
)
def test_tensors_are_kept_as_asked(tmp_path, save, setting, saved):
    loaded = load_scenario(SMOKE, overrides=["run.runtime=loopback", setting])
    Session(save_tensors=SaveTensors(save)).run(loaded, tmp_path)
    assert (tmp_path / "tensors.safetensors").exists() is saved
