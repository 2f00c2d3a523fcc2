"""Build a wheel again with a patch applied, under a version of its own.

`python -m workflow.patch_wheel PACKAGE-1.2-....whl --patch FIX.patch --label fixed --out wheels` writes
`wheels/PACKAGE-1.2+fixed-....whl`. A lock pins it as `package==1.2+fixed` after a line `--find-links wheels`, and a
search space declares it as version `1.2+fixed`: an arm that was patched says so wherever it is named.
"""

import argparse
import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from workflow.bundle import EPOCH
from workflow.contract import InputError, reports_input_errors


def patch_wheel(wheel: Path, patch: Path, label: str, out: Path) -> Path:
    """Write the patched wheel into `out` and return its path.

    `patch` is a unified diff whose paths begin one folder above the wheel's (`a/package/module.py`). `label` becomes
    the version's local part. Raises InputError for a file that is no wheel, a label that no version may have, and a
    patch that does not apply without guessing.
    """
    match = re.fullmatch(r"([^-+]+)-([^-+]+)((?:-[^-]+){3,4}\.whl)", wheel.name)
    if match is None or not wheel.is_file():
        raise InputError("no wheel of a public version", file=wheel, allowed="NAME-VERSION-PYTHON-ABI-PLATFORM.whl")
    if not re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", label):
        raise InputError(
            f"found {label!r}", key="--label", allowed="letters a to z and digits, in words joined by dots"
        )
    name, version, rest = match.groups()
    old, new = f"{name}-{version}.dist-info", f"{name}-{version}+{label}.dist-info"
    with zipfile.ZipFile(wheel) as source, tempfile.TemporaryDirectory() as folder:
        source.extractall(folder)
        _apply(patch, Path(folder))
        metadata = Path(folder) / old / "METADATA"
        text, stated = re.subn(
            rf"(?m)^Version: {re.escape(version)}$", f"Version: {version}+{label}", metadata.read_text(), count=1
        )
        if not stated:
            raise InputError(f"its METADATA does not say that this is version {version}", file=wheel)
        metadata.write_text(text)
        # What is there now, and not what was packed: a patch adds files and removes some.
        files = sorted(
            path for path in Path(folder).rglob("*") if path.is_file() and path != metadata.parent / "RECORD"
        )
        modes = {info.filename: info.external_attr for info in source.infolist()}
        out.mkdir(parents=True, exist_ok=True)
        target = out / f"{name}-{version}+{label}{rest}"
        temporary = target.with_suffix(".new")
        record = []
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as built:
            for path in files:
                data, place = path.read_bytes(), path.relative_to(folder).as_posix()
                kept = zipfile.ZipInfo(place.replace(old, new, 1), EPOCH)
                kept.external_attr, kept.compress_type = modes.get(place, 0o644 << 16), zipfile.ZIP_DEFLATED
                built.writestr(kept, data)
                checksum = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                record.append(f"{kept.filename},sha256={checksum},{len(data)}")
            listing = "\n".join([*record, f"{new}/RECORD,,"]) + "\n"
            built.writestr(zipfile.ZipInfo(f"{new}/RECORD", EPOCH), listing)
        if target.exists() and target.read_bytes() != temporary.read_bytes():
            temporary.unlink()
            # Environments and points are named by the version: another content under it would be taken for this one.
            raise InputError(f"{target} is there with another content", key="--label", do="choose another label")
        temporary.replace(target)
    return target


def _apply(patch: Path, folder: Path) -> None:
    """Apply a patch below a folder; raises InputError with what `patch` says."""
    # Without fuzz: a hunk that only nearly fits was written for another release.
    argv = ["patch", "--batch", "--forward", "--fuzz=0", "--strip=1", "--no-backup-if-mismatch"]
    try:
        with patch.open("rb") as text:
            done = subprocess.run(argv, stdin=text, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        missing = patch if error.filename == str(patch) else "the program `patch`"
        raise InputError(f"no {missing}", file=patch, do="give the patch's path, and install GNU patch") from None
    if done.returncode or re.search(r"\(offset -?\d+ lines?\)", done.stdout):
        raise InputError(f"the patch does not fit this wheel:\n{(done.stdout + done.stderr).strip()}", file=patch)


@reports_input_errors
def main(arguments: list[str] | None = None) -> int:
    """Build one wheel; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m workflow.patch_wheel", description=__doc__)
    parser.add_argument("wheel", type=Path, help="the published wheel")
    parser.add_argument("--patch", type=Path, required=True, help="a unified diff")
    parser.add_argument("--label", required=True, help="what the version says after its plus sign")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new wheel")
    options = parser.parse_args(arguments)
    print(patch_wheel(options.wheel, options.patch, options.label, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
