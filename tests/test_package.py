"""`import labkit` is instant, and its names arrive on first use."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import labkit
from labkit import errors

HEAVY = {"torch", "transformers", "numpy", "plotly", "ipywidgets", "IPython", "pandas"}


def test_import_takes_under_a_second_and_light_modules_load_nothing_heavy():
    code = (
        "import json, sys, time; t = time.perf_counter(); import labkit; dir(labkit); labkit.__version__;"
        "t = time.perf_counter() - t; labkit.errors, labkit.profile, labkit.notebooks;"
        "print(json.dumps([t, sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, modules = json.loads(done.stdout)
    assert "labkit.notebooks" in modules and not HEAVY & {m.partition(".")[0] for m in modules}
    assert seconds < 1


def test_every_public_name_can_be_reached_and_is_the_one_its_module_defines():
    assert set(labkit.__all__) <= set(dir(labkit)) and len(labkit.__all__) == len(set(labkit.__all__))
    for name in labkit.__all__:
        value = getattr(labkit, name)
        if inspect.ismodule(value):
            assert value.__name__ == f"labkit.{name}"
        elif name != "__version__":
            assert getattr(sys.modules[value.__module__], name) is value
            assert value.__module__.startswith("labkit.")


def test_every_error_of_labkit_is_reachable_from_the_top_and_is_a_labkit_error():
    own = [n for n, e in vars(errors).items() if inspect.isclass(e) and e.__module__ == "labkit.errors"]
    assert len(own) == 8
    for name in own:
        assert getattr(labkit, name) is getattr(errors, name)
        assert issubclass(getattr(labkit, name), labkit.LabkitError)


@pytest.mark.parametrize(
    ("wrong", "hint"), [("to_bidirectionnal", "labkit.to_bidirectional"), ("zzz", "Public names: ")]
)
def test_an_unknown_name_is_an_attribute_error_that_helps(wrong, hint):
    with pytest.raises(AttributeError, match=f"no attribute '{wrong}'.*{hint}"):
        getattr(labkit, wrong)


def test_every_module_with_annotated_shapes_is_checked_while_the_tests_run(pytestconfig):
    """The pytest option --jaxtyping-packages is what makes annotated shapes more than comments."""
    import torch

    from labkit.tasks.embed import in_batch_contrastive

    with pytest.raises(Exception, match="checking the parameters of labkit.tasks.embed"):
        in_batch_contrastive(torch.zeros(2, 3), torch.zeros(2, 5))
    named, _, checker = pytestconfig.getoption("--jaxtyping-packages").rpartition(",")
    folder = Path(labkit.__file__).parent
    files = [file for file in folder.rglob("*.py") if "from jaxtyping import" in file.read_text(encoding="utf-8")]
    shaped = {".".join(("labkit", *file.relative_to(folder).with_suffix("").parts)) for file in files}
    shaped = {name.removesuffix(".__init__") for name in shaped}
    assert checker == "beartype.beartype"
    assert named == "labkit" or set(named.split(",")) == shaped


@pytest.mark.parametrize("name", ["to_bidirectional", "to_causal", "audit", "assert_causal", "find_leaks"])
def test_the_result_of_load_in_place_of_its_model_is_refused(name):
    lm = labkit.load("tiny-gpt2")
    with pytest.raises(labkit.LabkitError, match="not Loaded; of labkit.load give `.model`"):
        getattr(labkit, name)(lm)
