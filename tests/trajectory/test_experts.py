"""Rows of experts follow the tokens through turns and branches."""

from turnwise.trajectory import Trajectory


def rows(ids: list[int]) -> bytes:
    """Three bytes for each id but the last, which tell the ids before it and itself."""
    return b"".join(
        bytes([sum(ids[: place + 1]) % 251, place, ids[place]]) for place in range(len(ids) - 1)
    )


def add(trajectory: Trajectory, prompt: list[int], sampled: list[int], known: bool = True) -> None:
    values = [-0.5] * len(sampled), [0] * len(sampled)
    experts = rows(prompt + sampled) if known else b""
    trajectory.add_turn(prompt, sampled, *values, "stop", experts=experts)


def test_each_branch_has_the_rows_of_its_tokens() -> None:
    trajectory = Trajectory("p")
    add(trajectory, [1, 2, 3], [4, 5])
    add(trajectory, [1, 2, 3, 4, 5, 6], [7])  # continues
    add(trajectory, [1, 2, 3, 4, 5, 6, 7, 8], [9, 10])
    add(trajectory, [1, 2, 3, 4, 11], [12, 13])  # leaves within the first answer
    add(trajectory, [20], [21])  # shares nothing
    assert sum(len(turn.experts) for turn in trajectory.turns) == 3 * (4 + 2 + 3 + 3 + 1)
    again = Trajectory.from_json(trajectory.to_json())
    assert again == trajectory
    for one in (trajectory, again):
        branches = one.branches()
        assert len(branches) == 3
        for branch in branches:
            assert branch.experts == rows(branch.token_ids)


def test_a_branch_with_a_turn_without_rows_has_none() -> None:
    trajectory = Trajectory("p")
    add(trajectory, [1, 2], [3])
    add(trajectory, [1, 2, 3, 4], [5], known=False)
    add(trajectory, [1, 9], [8])
    lost, whole = trajectory.branches()
    assert lost.experts == b""
    assert whole.experts == rows([1, 9, 8])
    assert "experts" not in Trajectory("p").to_json()
