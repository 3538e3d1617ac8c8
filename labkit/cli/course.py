"""`labkit course`: assignments built, checked and graded. Registered in labkit/cli/root.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.cli.console import Json, aside, print_json, print_table
from labkit.errors import CourseError

if TYPE_CHECKING:
    from labkit.course.grades import Grade
    from labkit.course.variant import Variant

SECRET = "LABKIT_VARIANT_SECRET"
app = typer.Typer(help="Build, check and grade assignments.")

Secret = Annotated[
    Path | None,
    typer.Option(
        "--variant",
        metavar="FILE",
        help=f"File with the secret of a private variant; or set {SECRET}. Default: the public variant.",
    ),
]
Assignment = Annotated[str | None, typer.Option(help="a1 to a5, for notebooks without metadata.")]


def _variant(file: Path | None) -> Variant:
    """The private variant of the secret in the file or the environment, never on the command line: `ps` shows that."""
    from labkit.course.variant import Variant

    if file is None:
        return Variant.of(os.environ.get(SECRET) or None)
    if not file.exists():
        raise CourseError(f"--variant takes a file that holds the secret, and there is none at {file}; or set {SECRET}")
    return Variant.of(file.read_text(encoding="utf-8").strip())


@app.command("list")
def course_list(as_json: Json = False) -> None:
    """List the assignments.

    Shows exercises, points and minutes.

    Example: labkit course list
    """
    from labkit.course.build import masters
    from labkit.course.exercises import assignment

    assignments = [assignment(name) for name in masters()]
    if as_json:
        fields = ("name", "title", "answer", "difficulty", "minutes", "points", "track")
        print_json(
            [
                {"name": of.name, "title": of.title, "minutes": of.minutes, "points": of.points}
                | {"exercises": [{field: getattr(task, field) for field in fields} for task in of.exercises.values()]}
                for of in assignments
            ]
        )
        return
    rows = [(of.name, of.title, str(len(of.exercises)), str(of.points), str(of.minutes)) for of in assignments]
    print_table(("", "assignment", "exercises", "points", "minutes"), rows)


@app.command("build")
def course_build(
    names: Annotated[list[str] | None, typer.Argument(metavar="[A1]...", help="Assignments. Default: all.")] = None,
    output_dir: Annotated[str, typer.Option(help="Folder for student/, solution/ and nbgrader/.")] = "course",
    variant: Secret = None,
    execute: Annotated[bool, typer.Option("--execute", help="Execute the solutions, to store their outputs.")] = False,
    as_json: Json = False,
) -> None:
    """Build the notebooks of the assignments.

    Writes the student notebooks, the solutions and the files for nbgrader. A secret changes the sentences, sizes,
    seeds, planted faults and hidden tests, and leaves the solutions out of the student notebooks. Keep the secret:
    grading needs it.

    Example: labkit course build --output-dir course --variant secret.txt
    """
    from labkit.course.build import build

    written = build(output_dir, _variant(variant), [name.lower() for name in names or ()] or None, execute=execute)
    if as_json:
        print_json([str(path) for path in written])
    else:
        print(f"{len(written)} files written to {output_dir}")


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
    from labkit.cli.console import waiting
    from labkit.course import grade, submissions
    from labkit.course.variant import Variant

    submission = submissions.read(notebook.stem, notebook, assignment and assignment.lower())
    with waiting("running the notebook"):
        result = grade.grade(submission, Variant(submission.variant_key), hidden=False, trusted=True)
    if as_json:
        print_json(result.to_dict())
    else:
        rows = [(o.exercise, o.status, f"{o.points} of {o.out_of}") for o in result.outcomes]
        print_table(("exercise", "", "points"), [*rows, ("in all", "", result.score)])
        print("".join(f"\n{outcome}\n" for outcome in result.outcomes if outcome.message), end="")
        print("".join(f"\n{trouble}\n" for trouble in result.trouble), end="")
    raise typer.Exit(0 if result.points == result.out_of else 1)


@app.command("grade")
def course_grade(
    path: Annotated[Path, typer.Argument(help="A notebook, or a folder with STUDENT.ipynb or STUDENT/NAME.ipynb.")],
    output_dir: Annotated[Path, typer.Option(help="Folder for the grades.")] = Path("grades"),
    variant: Secret = None,
    assignment: Assignment = None,
    jobs: Annotated[
        int | None, typer.Option(help="Number of submissions in parallel. Default: the number of cores.", min=1)
    ] = None,
    cell_seconds: Annotated[float, typer.Option(help="Time limit for a cell, in seconds.", min=1)] = 60,
    call_seconds: Annotated[
        float, typer.Option(help="Time limit for one call of an answer, in seconds.", min=0.1)
    ] = 10,
    total_seconds: Annotated[float, typer.Option(help="Time limit for a submission, in seconds.", min=1)] = 600,
    memory_gb: Annotated[float, typer.Option(help="Memory limit for a submission, in GiB.", min=0.5)] = 4,
    again: Annotated[bool, typer.Option("--again", help="Grade unchanged files again.")] = False,
    trust_submissions: Annotated[
        bool,
        typer.Option(
            "--trust-submissions",
            help="Run without bubblewrap: the students' code runs as you, and can read and change what you can.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Grade submissions, with the hidden tests.

    Writes a page and a JSON file for each student, and class.html and grades.csv for all grades in the folder. Each
    submission runs in bubblewrap, with limits, and its answers are judged outside it: a submission that fails, hangs or
    runs out of memory does not stop the others. After an interruption, the same command continues. docs/instructors.md
    states what is protected. Exit code 1 if a submission could not be graded.

    Example: labkit course grade submissions --output-dir grades
    """
    from tqdm import tqdm

    from labkit.course import submissions
    from labkit.course.grade import grade_all
    from labkit.course.sandbox import Limits, require_isolation

    limits = Limits(cell_seconds, call_seconds, total_seconds, int(memory_gb * 2**30))
    secret = _variant(variant)
    if variant and not trust_submissions:
        require_isolation([variant])
    there: list[bool] = []  # for each grade: whether it is kept from before
    with tqdm(total=len(submissions.find(path)), unit="submission", disable=None) as bar:

        def count(grade: Grade, kept: bool) -> None:
            there.append(kept)
            bar.update()

        try:
            grades = grade_all(
                path, output_dir, variant=secret, limits=limits, jobs=jobs, again=again, trusted=trust_submissions,
                assignment_name=assignment and assignment.lower(), on_grade=count,
            )  # fmt: skip
        except KeyboardInterrupt:
            message = f"labkit: interrupted; {len(there)} grades are in {output_dir}, and the same command continues"
            print(message, file=sys.stderr)
            raise
    if as_json:
        print_json([grade.to_dict() for grade in grades])
    else:
        print_table(("student", "points", ""), [(grade.student, grade.score, grade.failure) for grade in grades])
        print(f"{output_dir}: {len(grades)} grades, {sum(there)} of them kept from before; class.html, grades.csv")
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
    from labkit.course.pages import write_class, write_student

    graded = _grades(grades)
    for grade in graded:
        write_student(grade, grades)
    write_class(graded, grades)
    if as_json:
        print_json({"folder": str(grades), "grades": len(graded)})
    else:
        print(f"{grades}: {len(graded)} grades; class.html, grades.csv")


@app.command("gradebook")
def course_gradebook(
    grades: Annotated[Path, typer.Argument(help="The output folder of labkit course grade.")],
    kind: Annotated[str, typer.Option(help="canvas or moodle.")],
    output: Annotated[Path, typer.Option(help="The CSV file to write; - is standard output.")],
    roster: Annotated[
        Path | None, typer.Option(help="The CSV file that the gradebook exported: its rows are kept.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write grades for Canvas or Moodle.

    The CSV file can be imported into the gradebook.

    Example: labkit course gradebook grades --kind canvas --roster export.csv --output import.csv
    """
    from labkit.course.gradebook import gradebook_csv
    from labkit.files import write_whole

    graded = _grades(grades)
    text, without = gradebook_csv(graded, kind, roster)
    write_whole(output, text)
    with aside(output):
        if as_json:
            print_json({"file": str(output), "grades": len(graded), "not_in_roster": without})
        else:
            print(f"{output}: {len(graded) - len(without)} grades")
            if without:
                print(f"not in the roster: {', '.join(without)}")


def _grades(folder: Path) -> list[Grade]:
    from labkit.course.grades import read_grades

    if grades := list(read_grades(folder)):
        return grades
    raise CourseError(f"{folder} holds no grades; `labkit course grade` writes them")
