"""What another verl lacks of what the recipe takes from it: ``python -m tests.upstream PATH``, of its checkout.

The table is ``tests/unit/upstream_contract.py``, whose test holds it against the installed release; a line a finding. The
patches of ``verl_ext`` are made to the other verl, whatever its release.
"""

import importlib
import sys
from pathlib import Path


def findings():
    """What is gone, taken otherwise, or cannot be imported."""
    from tests.unit import test_upstream_contract as contract

    def tried(what, look):
        try:
            return look()
        except Exception as error:
            return [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else what}"]

    for uses in contract.CONTRACT:
        if uses.owner.startswith("verl"):
            wrong = tried(uses.owner, lambda uses=uses: contract.missing(uses))
            yield from (f"{uses.owner} (used in {', '.join(uses.by)}): {each}" for each in wrong)
    for name in contract.our_module_names():
        wrong = tried(name, lambda name=name: contract.misfits([importlib.import_module(name)]))
        yield from (f"{name}: {each}" for each in wrong)


def main():
    if len(sys.argv) != 2 or not Path(sys.argv[1], "verl", "__init__.py").is_file():
        sys.exit("usage: python -m tests.upstream PATH    of a checkout of verl")
    sys.path.insert(0, str(Path(sys.argv[1]).resolve()))
    import verl

    version = Path(verl.__file__).parent / "version" / "version"
    print(f"verl {version.read_text().strip() if version.is_file() else '?'} in {Path(verl.__file__).parent}")
    found = list(findings())
    print(*found, f"{len(found)} findings", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
