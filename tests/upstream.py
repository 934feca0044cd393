"""What another verl, or another vLLM, lacks of what the recipe takes from it: ``python -m tests.upstream PATH``.

PATH is a checkout of verl, or a wheel of vLLM, of which only the Python files are read. The tables are those of
``tests/unit/upstream_contract.py`` and ``preflight.vllm_contract``, whose test holds them against the installed releases; a
line a finding. The patches of ``verl_ext`` are made to the other release, whatever it is.
"""

import importlib
import re
import sys
import tempfile
import zipfile
from pathlib import Path


def findings(package):
    """What of ``package`` is gone, taken otherwise, or cannot be imported."""
    from recipe.partial_rollout.preflight.vllm_contract import lacks, tried
    from tests.unit import test_upstream_contract as contract

    yield from lacks(uses for uses in contract.CONTRACT if re.match(rf"{package}\b", uses.owner))
    for name in contract.our_module_names():
        wrong = tried(lambda name=name: contract.misfits([importlib.import_module(name)]))
        yield from (f"{name}: {each}" for each in wrong)


def unpacked(wheel, folder):
    """``folder``, with the Python files of ``wheel``. Its compiled ones need a torch that may not be the installed one."""
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder, [name for name in files.namelist() if name.endswith((".py", ".json"))])
    return folder


def main():
    path = Path(sys.argv[1] if len(sys.argv) == 2 else "")
    wheel = re.match(r"(vllm(?:_cpu)?)-([\w.+]+?)-.*\.whl$", path.name)
    if not (wheel and path.is_file()) and not (path / "verl" / "__init__.py").is_file():
        sys.exit("usage: python -m tests.upstream PATH    of a checkout of verl, or of a wheel of vLLM")
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, unpacked(path, folder) if wheel else str(path.resolve()))
        package = "vllm" if wheel else "verl"
        place = Path(importlib.import_module(package).__file__).parent
        noted = place / "version" / "version"
        release = wheel[2] if wheel else noted.read_text().strip() if noted.is_file() else "?"
        print(f"{package} {release} in {path if wheel else place}")
        found = list(findings(package))
    print(*found, f"{len(found)} findings", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
