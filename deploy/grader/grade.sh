#!/usr/bin/env bash
# Grades SUBMISSIONS/NAME.ipynb into GRADES, each submission in a container of its own. Untested: see the Dockerfile.
#
#   bash deploy/grader/grade.sh SUBMISSIONS GRADES [options of `labkit course grade`, such as --variant SECRET]
set -euo pipefail

if [ "$(id -u)" = 0 ]; then
    echo "run this as somebody else than root: the containers take your user id" >&2
    exit 1
fi
submissions=$(realpath "$1") grades=$(realpath -m "$2")
shift 2
mkdir -p "$grades"

boxed() { # SOURCE TARGET: both are mounted, the first one to be read only; then options
    docker run --rm --network none --read-only --tmpfs /tmp:rw,nosuid,nodev,size=1g,mode=1777 \
        --user "$(id -u):$(id -g)" --cap-drop ALL --security-opt no-new-privileges \
        --memory 6g --memory-swap 6g --pids-limit 256 --cpus 2 \
        --mount "type=bind,src=$1,dst=/in/$(basename "$1"),readonly" --mount "type=bind,src=$2,dst=/grades" \
        labkit-grader "/in/$(basename "$1")" --output-dir /grades --jobs 1 "${@:3}"
}

for notebook in "$submissions"/*.ipynb; do
    name=$(basename "$notebook" .ipynb)
    box=$(mktemp -d)
    boxed "$notebook" "$box" "$@" || echo "labkit: $name was not graded" >&2
    # Nothing but the two files that belong to this student leaves the box.
    for file in "$name.json" "$name.html"; do
        if [ -f "$box/$file" ] && [ ! -L "$box/$file" ]; then cp "$box/$file" "$grades/$file"; fi
    done
    rm -rf "$box"
done
# The class: grades that are there are kept and not run again; one that failed is tried once more, in a box as well.
boxed "$submissions" "$grades" "$@"
