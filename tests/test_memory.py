"""What is kept, and that it has an end."""

from andrea_triton.memory import Memory


def test_a_value_comes_back_under_its_key() -> None:
    memory = Memory()
    assert memory.get("a") is None
    assert memory.keep("a", 1) == 1 and memory.get("a") == 1


def test_full_it_is_emptied() -> None:
    memory = Memory(room=3)
    sizes = []
    for i in range(8):
        memory.keep(i, -i)
        sizes.append(len(memory))
        assert memory[i] == -i, "the newest is always there"
    assert sizes == [1, 2, 3, 1, 2, 3, 1, 2]
