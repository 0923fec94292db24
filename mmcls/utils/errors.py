"""The ways a run ends, other than by finishing; docs/architecture.md has the table of exit statuses."""


class RequestError(Exception):
    """The user's request cannot be carried out: exit status 2 and one line.

    Args:
        subject: what is wrong, as the user wrote it: `--flag=value`, or a file's path.
        problem: what is wrong with it.
        remedy: what to change.
    """

    exit_status = 2

    def __init__(self, subject: str, problem: str, remedy: str):
        super().__init__(subject, problem, remedy)
        self.subject, self.problem, self.remedy = subject, problem, remedy

    def __str__(self) -> str:
        return f"{self.subject}: {self.problem}; {self.remedy}"


class DivergenceError(Exception):
    """The loss or the weights are not finite any more: exit status 3."""

    exit_status = 3
