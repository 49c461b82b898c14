#!/bin/sh
# Train, or go on: for launchers that start a command again after its machine was taken away.
#
#     sh examples/launchers/train_or_resume.sh RUN_FOLDER CONFIG [KEY=VALUE ...]
#
# The run's folder must outlive the machine. SIGTERM goes to turnwise itself, which saves its last
# step. With PID_FILE, the number of its process is written there, for hooks that send the signal.
set -eu

folder=$1
config=$2
shift 2

if [ -n "${PID_FILE:-}" ]; then
    echo $$ > "$PID_FILE"
fi
if ls -d "$folder"/checkpoints/step-*[0-9] > /dev/null 2>&1; then
    exec turnwise train --resume "$folder" "$@"
fi
if [ -e "$folder/metrics.jsonl" ]; then # it ended before its first checkpoint
    mv "$folder" "$folder.$(date +%s)"
fi
exec turnwise train "$config" "output_dir=$(dirname "$folder")" "name=$(basename "$folder")" "$@"
