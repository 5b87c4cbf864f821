#!/usr/bin/env bash
# Make a site folder with vLLM 0.33.0 and packed-kv on a GPU host that reaches no package index, from a bundle.
#
#   gpu_site.sh SITE PART...     then: PYTHONPATH=SITE python3 ...
#
# PARTs are the xz tarball parts of a bundle of vLLM and the packages it needs; PyTorch, Triton and transformers come
# from the host. packed-kv is taken from this checkout, with its metadata, so that vLLM finds the plugin.
set -euo pipefail
site=$1; shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$site"
cat "$@" | xz -dc -T0 | tar -C "$site" -x
rm -rf "$site"/{packed_kv,packed_kv_patches,packed_kv_quality,tq_calibrate} # `cp -r` into a folder that is there would nest
cp -r "$root/overlay/packed_kv" "$site/packed_kv"
cp -r "$root/calibration/tq_calibrate" "$site/tq_calibrate"
cp -r "$root/quality/packed_kv_quality" "$site/packed_kv_quality"
cp -r "$root/vllm_patches" "$site/packed_kv_patches"
python3 - "$root" "$site" <<'PY'
import pathlib, sys, tomllib
root, site = map(pathlib.Path, sys.argv[1:])
project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
info = site / f"packed_kv-{project['version']}.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
groups = {**project["entry-points"], "console_scripts": project["scripts"]}
(info / "entry_points.txt").write_text(
    "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items())
)
PY
PYTHONPATH="$site" python3 -m packed_kv_patches.patcher apply --target "$site"
