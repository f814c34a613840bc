import copy
import json
import pathlib

import pytest

from packedconv import config as configuration

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def defaults():
    return configuration.load_yaml(ROOT / "config" / "config.yaml")


def test_defaults_are_the_papers_protocol(defaults):
    settings = configuration.resolve(defaults, ROOT)
    assert settings["run"] == "paper"
    assert (settings["protocol"]["rounds"], settings["protocol"]["executions"]) == (10, 40)
    assert settings["sparsities"] == [0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98]
    assert [layer["out_channels"] for layer in settings["layers"]] == [48, 64, 80, 96, 112, 128]
    for layer in settings["layers"]:
        assert (layer["height"], layer["width"], layer["in_channels"]) == (256, 256, 32)
        assert (layer["batch"], layer["kernel_size"], layer["stride"], layer["padding"]) == (
            *(1, 3, 1),
            1,
        )


def test_smoke_is_a_run_of_its_own(defaults):
    smoke = configuration.load_yaml(ROOT / "config" / "smoke.yaml")
    settings = configuration.resolve({**defaults, **smoke}, ROOT)
    assert settings["run"] == "smoke"
    assert len(settings["sparsities"]) < 9


@pytest.mark.parametrize("name", configuration.device_names(ROOT))
def test_every_device_file_is_valid(name):
    assert configuration.load_device(ROOT, name)["name"] == name


def test_another_seed_is_another_run(defaults):
    assert configuration.resolve({**defaults, "seed": 2}, ROOT)["run"] == "seed2"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sparsities", [0.5]),
        ("protocol", {"rounds": 2, "executions": 1, "warmup_executions": 0, "trial_executions": 1}),
    ],
)
def test_other_changes_need_a_name(defaults, key, value):
    changed = {**defaults, key: value}
    with pytest.raises(ValueError, match=f"run: expected a name, since {key} differ"):
        configuration.resolve(changed, ROOT)
    assert configuration.resolve({**changed, "run": "mine"}, ROOT)["run"] == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sed": 2}, "config: top level: .*'sed' was unexpected"),
        ({"seed": "two"}, "config: seed: 'two' is not of type 'integer'"),
        ({"seed": -1}, "config: seed: -1 is less than the minimum"),
        ({"device": "a200"}, "device: expected one of .*cpu.*, got 'a200'"),
        ({"device": "../cpu"}, "device: expected one of"),
        ({"sparsities": [0.955]}, "sparsities: expected whole hundredths, got 0.955"),
        ({"sparsities": [1.0]}, "config: sparsities.0"),
        ({"sparsities": [0.9, 0.9]}, "config: sparsities"),
        ({"run": "cpu"}, "run: expected a name that is no device's, got 'cpu'"),
        ({"run": "../paper"}, "config: run"),
        ({"layers": {"batch": 1}}, "config: layers"),
        ({"weights": {"distribution": "normal", "bound": "1"}}, "config: weights"),
    ],
)
def test_bad_configuration(defaults, change, message):
    with pytest.raises(ValueError, match=message):
        configuration.resolve({**defaults, **change}, ROOT)


@pytest.mark.parametrize("key", ["rounds", "executions", "warmup_executions", "trial_executions"])
def test_unknown_and_missing_protocol_keys(defaults, key):
    broken = copy.deepcopy(defaults)
    broken["protocol"][key + "x"] = broken["protocol"].pop(key)
    with pytest.raises(ValueError, match="config: protocol"):
        configuration.resolve(broken, ROOT)


def test_settings_text_is_canonical(defaults):
    settings = configuration.resolve(defaults, ROOT)
    shuffled = dict(reversed(list(settings.items())))
    assert configuration.settings_text(settings) == configuration.settings_text(shuffled)
    assert json.loads(configuration.settings_text(settings)) == settings


def test_stored_settings_are_not_overwritten(defaults, tmp_path):
    settings = configuration.resolve(defaults, ROOT)
    path = tmp_path / "settings.json"
    configuration.check_stored_settings(settings, path)
    path.write_text(configuration.settings_text(settings))
    configuration.check_stored_settings(settings, path)
    with pytest.raises(ValueError, match="was measured with another seed; name another run"):
        configuration.check_stored_settings({**settings, "seed": 2}, path)
