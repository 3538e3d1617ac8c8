"""`labkit course`: assignments built, checked and graded. Registered in labkit/cli/root.py."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.cli.console import Json, aside, report, table, waiting
from labkit.errors import CourseError

SECRET = "LABKIT_VARIANT_SECRET"
SECRET_HELP = f"File with the secret of a private variant; or set {SECRET}. Default: the public variant."
WRITTEN = "{}: {} grades; class.html, grades.csv"
SOLUTIONS_HELP = "Put the solutions into the students' notebooks too, folded, for self-study."
TRUST_HELP = "Run without bubblewrap: the students' code runs as you, and can read and change what you can."
app = typer.Typer(help="Build, check and grade assignments.")

Secret = Annotated[Path | None, typer.Option("--variant", metavar="FILE", help=SECRET_HELP)]
Jobs = Annotated[int | None, typer.Option(help="Submissions in parallel. Default: the number of cores.", min=1)]
Roster = Annotated[Path | None, typer.Option(help="CSV file that the gradebook exported: its rows are kept.")]
Assignment = Annotated[str | None, typer.Option(help="a1 to a5, for notebooks without metadata.")]


@app.command("list")
def course_list(as_json: Json = False) -> None:
    """List the assignments.

    Example: labkit course list
    """
    from labkit.course.build import masters
    from labkit.course.exercises import assignment

    fields, rows, cells = ("name", "title", "answer", "difficulty", "minutes", "points", "track"), [], []
    for of in map(assignment, masters()):
        exercises = [{field: getattr(exercise, field) for field in fields} for exercise in of.exercises.values()]
        about = {"name": of.name, "title": of.title, "minutes": of.minutes, "points": of.points}
        rows.append(about | {"exercises": exercises})
        cells.append((of.name, of.title, len(exercises), of.points, of.minutes))
    report(as_json, rows, table(("", "assignment", "exercises", "points", "minutes"), cells))


@app.command("build")
def course_build(
    names: Annotated[list[str] | None, typer.Argument(metavar="[A1]...", help="Assignments. Default: all.")] = None,
    output_dir: Annotated[str, typer.Option(help="Folder for student/, solution/ and nbgrader/.")] = "course",
    variant: Secret = None,
    execute: Annotated[bool, typer.Option("--execute", help="Execute the solutions, to store their outputs.")] = False,
    with_solutions: Annotated[bool, typer.Option("--with-solutions", help=SOLUTIONS_HELP)] = False,
    as_json: Json = False,
) -> None:
    """Build the notebooks of the assignments.

    Writes the student notebooks, the solutions and the files for nbgrader. A secret changes the sentences, sizes,
    seeds, planted faults and hidden tests. Keep the secret: grading needs it.

    Example: labkit course build --output-dir course --variant secret.txt
    """
    from labkit.course.build import build

    chosen = [name.lower() for name in names or ()] or None
    paths = build(output_dir, _variant(variant), chosen, execute=execute, with_solutions=with_solutions)
    report(as_json, paths, f"{len(paths)} files written to {output_dir}")


@app.command("check")
def course_check(
    notebook: Annotated[Path, typer.Argument(help="The notebook of your assignment.")],
    assignment: Assignment = None,
    as_json: Json = False,
) -> None:
    """Run an assignment and check your answers.

    Runs the notebook from top to bottom, with the same checks as its check cells. This is for your own notebook: its
    code runs as you, as in Jupyter. Exit code 1 unless every exercise has full points.

    Example: labkit course check a1_masks_and_attention.ipynb
    """
    from labkit.course.exercises import assignment as registered
    from labkit.course.grade import grade
    from labkit.course.sandbox import Limits

    with waiting("running the notebook"):
        result = grade(notebook.stem, notebook, Limits(), assignment_name=assignment, trusted=True)
    later = registered(result.assignment).points - result.out_of
    rows = [(o.exercise, o.status, f"{o.points} of {o.out_of}") for o in result.outcomes]
    rows.append(("in all", "", result.score + (f"; {later} more when it is graded" if later else "")))
    texts = [*(outcome for outcome in result.outcomes if outcome.message), *result.trouble]
    report(as_json, asdict(result), table(("exercise", "", "points"), rows), *(f"\n{text}" for text in texts))
    raise typer.Exit(0 if result.points == result.out_of else 1)


@app.command("grade")
def course_grade(
    path: Annotated[Path, typer.Argument(help="A notebook, or a folder with STUDENT.ipynb or STUDENT/NAME.ipynb.")],
    output_dir: Annotated[Path, typer.Option(help="Folder for the grades.")] = Path("grades"),
    variant: Secret = None,
    assignment: Assignment = None,
    jobs: Jobs = None,
    cell_seconds: Annotated[float, typer.Option(help="Time limit for a cell, in seconds.", min=1)] = 60,
    call_seconds: Annotated[float, typer.Option(help="Time limit for a call of an answer, in seconds.", min=0.1)] = 10,
    total_seconds: Annotated[float, typer.Option(help="Time limit for a submission, in seconds.", min=1)] = 600,
    memory_gb: Annotated[float, typer.Option(help="Memory limit for a submission, in GiB.", min=0.5)] = 4,
    again: Annotated[bool, typer.Option("--again", help="Grade unchanged files again.")] = False,
    trust_submissions: Annotated[bool, typer.Option("--trust-submissions", help=TRUST_HELP)] = False,
    as_json: Json = False,
) -> None:
    """Grade submissions, with the hidden tests.

    Writes a page and a JSON file for each student, and class.html and grades.csv for all grades in the folder. Each
    submission runs in bubblewrap, with limits, and its answers are judged outside it: a submission that fails, hangs or
    runs out of memory does not stop the others. After an interruption, the same command continues. docs/instructors.md
    states what is protected. Exit code 1 if a submission could not be graded.

    Example: labkit course grade submissions --output-dir grades
    """
    from labkit.course.grade import grade_all
    from labkit.course.sandbox import Limits, require_hidden

    secret, limits = _variant(variant), Limits(cell_seconds, call_seconds, total_seconds, int(memory_gb * 2**30))
    if variant and not trust_submissions:
        require_hidden(variant)
    try:
        grades = grade_all(
            path, output_dir, secret, limits,
            assignment_name=assignment, jobs=jobs, again=again, trusted=trust_submissions,
        )  # fmt: skip
    except KeyboardInterrupt:
        print(f"labkit: interrupted; grades are in {output_dir}, and the same command continues", file=sys.stderr)
        raise
    rows = [(grade.student, grade.score, grade.remark) for grade in grades]
    lines = table(("student", "points", ""), rows), WRITTEN.format(output_dir, len(grades))
    report(as_json, [asdict(grade) for grade in grades], *lines)
    raise typer.Exit(1 if any(grade.failure for grade in grades) else 0)


@app.command("pages")
def course_pages(
    grades: Annotated[Path, typer.Argument(help="A folder with the JSON files of labkit course grade.")],
    as_json: Json = False,
) -> None:
    """Write the pages of a folder of grades.

    Reads the JSON files and writes each student's page, class.html and grades.csv. Runs no submission.

    Example: labkit course pages grades
    """
    from labkit.course.grades import write_pages

    graded = _grades(grades)
    write_pages(graded, grades)
    report(as_json, {"folder": grades, "grades": len(graded)}, WRITTEN.format(grades, len(graded)))


@app.command("gradebook")
def course_gradebook(
    grades: Annotated[Path, typer.Argument(help="The output folder of labkit course grade.")],
    kind: Annotated[str, typer.Option(help="canvas or moodle.")],
    output: Annotated[Path, typer.Option(help="The CSV file to write; - is standard output.")],
    roster: Roster = None,
    as_json: Json = False,
) -> None:
    """Write grades for Canvas or Moodle.

    The CSV file can be imported into the gradebook.

    Example: labkit course gradebook grades --kind canvas --roster export.csv --output import.csv
    """
    from labkit.course.grades import gradebook_csv
    from labkit.files import write_whole

    graded = _grades(grades)
    text, without, ungraded = gradebook_csv(graded, kind, roster)
    write_whole(output, text)
    provisional = [grade.student for grade in graded if grade.timed_out]
    lists = {"not in the roster": without, "without a grade": ungraded, "provisional (time limit)": provisional}
    notes = "".join(f"; {what}: {', '.join(names)}" for what, names in lists.items() if names)
    about = {"file": output, "grades": len(graded), "not_in_roster": without}
    about |= {"without_grade": ungraded, "provisional": provisional}
    with aside(output):
        report(as_json, about, f"{output}: {len(graded) - len(without)} grades{notes}")


def _grades(folder: Path) -> list[Any]:
    from labkit.course.grades import read_grades

    if grades := read_grades(folder):
        return grades
    raise CourseError(f"{folder} holds no grades; `labkit course grade` writes them")


def _variant(file: Path | None) -> Any:
    """The private variant of the secret in the file or the environment, never on the command line: `ps` shows that."""
    from labkit.course.variant import Variant

    if file is None:
        return Variant.of(os.environ.get(SECRET) or None)
    if not file.exists():
        raise CourseError(f"--variant takes a file that holds the secret, and there is none at {file}; or set {SECRET}")
    return Variant.of(file.read_text(encoding="utf-8").strip())
