#!/bin/bash
# Installs the agents from their packages, in the versions that docs/decisions.md names: some minutes, 2 GB.
#
#   FIRN_LAB=folder       where it all goes, in its folder agents (default: firn-lab in the temporary folder)
#   PYTHON=python3.12     the interpreter for aider
set -euo pipefail
temp=${TMPDIR:-/tmp}
lab=${FIRN_LAB:-${temp%/}/firn-lab}/agents
mkdir -p "$lab"
cd "$lab"
[ -e package.json ] || echo '{"private": true}' > package.json
npm install --no-audit --no-fund @anthropic-ai/claude-code@2.1.197 @openai/codex@0.166.0 opencode-ai@1.18.33
if [ ! -e aider/bin/aider ]; then
  "${PYTHON:-python3}" -m venv aider
  aider/bin/pip install -q --disable-pip-version-check aider-chat==0.86.2
fi
echo "ready: $lab"
