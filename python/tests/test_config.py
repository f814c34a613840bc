import copy
import json
import pathlib
import shutil

import pytest
import yaml

from packedconv import config as configuration
from packedconv.device import slug
from packedconv.settings import validate_settings

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


GPUS = [
    name
    for name in configuration.device_names(ROOT)
    if configuration.load_device(ROOT, name)["kind"] == "cuda"
]


@pytest.mark.parametrize("name", GPUS)
def test_stated_peaks_are_those_of_the_hardware(name):
    """An FMA is two operations; the clock is the one that the stated peak goes with."""
    device = configuration.load_device(ROOT, name)
    gpu = device["gpu"]
    lanes = gpu["multiprocessors"] * gpu["fp32_lanes_per_multiprocessor"]
    assert device["peak_flops"] == pytest.approx(2 * lanes * gpu["clock_hz"], rel=0.02)
    assert gpu["shared_memory_per_block_bytes"] < gpu["shared_memory_per_multiprocessor_bytes"]


def test_device_files_tell_gpus_apart():
    """By what the driver says: a name, and the multiprocessors where two share one."""
    devices = [configuration.load_device(ROOT, name) for name in GPUS]
    keys = {(device["match"], device["gpu"]["multiprocessors"]) for device in devices}
    assert len(keys) == len(devices) >= 6
    assert {device["family"] for device in devices} == {"a100", "h200", "tegra-x1"}


@pytest.mark.parametrize("name", GPUS)
def test_device_files_are_named_as_the_devices_at_hand_are(name):
    assert slug(configuration.load_device(ROOT, name)["match"]) == name


@pytest.fixture
def a100(tmp_path):
    """An A100 of one's own: writes its device file with a change, and reads it."""
    shutil.copytree(ROOT / "config", tmp_path / "config")
    path = tmp_path / "config" / "devices" / "a100-sxm4-40gb.yaml"
    device = configuration.load_yaml(path)

    def load(change):
        change(device)
        path.write_text(yaml.safe_dump(device))
        return configuration.load_device(tmp_path, "a100-sxm4-40gb")

    return load


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda device: device.pop("gpu"), "top level: 'gpu' is a required property"),
        (lambda device: device.pop("match"), "top level: 'match' is a required property"),
        (lambda device: device["gpu"].pop("clock_hz"), "gpu: 'clock_hz' is a required property"),
        (lambda device: device["gpu"].update(clock=1.41e9), "gpu: .*'clock' was unexpected"),
        (lambda device: device["gpu"].update(compute_capability=8.0), "gpu.compute_capability"),
        (lambda device: device["gpu"].update(multiprocessors=0), "gpu.multiprocessors"),
        (lambda device: device.update(kind="cpu", family="cpu"), "gpu: None was expected"),
    ],
)
def test_bad_gpu(a100, change, message):
    assert a100(lambda device: None)["name"] == "a100-sxm4-40gb"
    with pytest.raises(ValueError, match=f"a100-sxm4-40gb.yaml: {message}"):
        a100(change)


def test_settings_carry_the_gpu(defaults):
    """To the machine that measures, which reads settings.json and no device file."""
    settings = configuration.resolve({**defaults, "device": "tegra-x1"}, ROOT)
    read = validate_settings(json.loads(configuration.settings_text(settings)))
    assert read["device"]["gpu"]["multiprocessors"] == 1


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
