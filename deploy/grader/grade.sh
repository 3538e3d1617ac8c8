#!/usr/bin/env bash
# Grades SUBMISSIONS/NAME.ipynb into GRADES, each submission in a container of its own. Untested: see the Dockerfile.
#
#   bash deploy/grader/grade.sh SUBMISSIONS GRADES [options of `labkit course grade`]
#
# For a private variant, LABKIT_VARIANT_SECRET holds the secret. A submission in a container can read it.
set -euo pipefail

if [ "$(id -u)" = 0 ]; then
    echo "run this as somebody else than root: the containers take your user id" >&2
    exit 1
fi
submissions=$(realpath "$1") grades=$(realpath -m "$2")
shift 2
mkdir -p "$grades"

in_container() { # options of docker, --, arguments of `labkit course`
    local options=()
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    docker run --rm --network none --read-only --tmpfs /tmp:rw,nosuid,nodev,size=1g,mode=1777 --env HOME=/tmp \
        --user "$(id -u):$(id -g)" --cap-drop ALL --security-opt no-new-privileges \
        --memory 6g --memory-swap 6g --pids-limit 256 --cpus 2 "${options[@]}" labkit-grader "${@:2}"
}

for notebook in "$submissions"/*.ipynb; do
    name=$(basename "$notebook" .ipynb)
    if [ -L "$notebook" ] || [ ! -f "$notebook" ]; then
        echo "labkit: $(printf %q "$name") is not a regular file and was not graded" >&2
        continue
    fi
    box=$(mktemp -d)
    mkdir "$box/in" "$box/out"
    cp "$notebook" "$box/in/submission.ipynb" # a fixed name: a student's could hold options of docker
    in_container --env LABKIT_VARIANT_SECRET --mount "type=bind,src=$box/in,dst=/in,readonly" \
        --mount "type=bind,src=$box/out,dst=/out" -- \
        grade /in/submission.ipynb --output-dir /out --jobs 1 --trust-submissions "$@" >/dev/null 2>&1 </dev/null ||
        echo "labkit: $(printf %q "$name") was not graded" >&2
    # Nothing but one small JSON file leaves the box: an HTML page could hold a script.
    file="$box/out/submission.json"
    if [ -f "$file" ] && [ ! -L "$file" ] && [ "$(stat -c %s "$file")" -le 1000000 ]; then
        cp "$file" "$grades/$name.json"
    fi
    rm -rf "$box"
done
# The last step runs no submission: it reads the JSON files, and writes the pages of the students and of the class.
in_container --mount "type=bind,src=$grades,dst=/grades" -- pages /grades
