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

shopt -s nullglob nocaseglob
for notebook in "$submissions"/*.ipynb; do
    name=$(basename "$notebook")
    name=${name%.*}
    if [ -L "$notebook" ] || [ ! -f "$notebook" ]; then
        echo "labkit: $(printf %q "$name") is not a regular file and was not graded" >&2
        continue
    fi
    box=$(mktemp -d)
    cp "$notebook" "$box/submission.ipynb" # a fixed name: a student's could hold options of docker
    # Nothing but the text of one small JSON file leaves the container: an HTML page could hold a script.
    in_container --env LABKIT_VARIANT_SECRET --mount "type=bind,src=$box,dst=/in,readonly" --entrypoint sh -- \
        -c 'labkit course grade /in/submission.ipynb --output-dir /tmp/grades --jobs 1 --trust-submissions "$@" >&2
            cat /tmp/grades/submission.json' sh "$@" </dev/null 2>/dev/null | head -c 1000000 >"$box/grade.json" || true
    if [ -s "$box/grade.json" ]; then
        cp "$box/grade.json" "$grades/$name.json"
    else
        echo "labkit: $(printf %q "$name") was not graded" >&2
    fi
    rm -rf "$box"
done
# The last step runs no submission: it reads the JSON files, and writes the pages of the students and of the class.
in_container --mount "type=bind,src=$grades,dst=/grades" -- pages /grades
