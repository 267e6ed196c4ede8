"""The risk of a group, as its host's status says it, in words."""


def word_of(group: dict) -> str:
    """`protected`, or the kind of reason why it is not."""
    return "protected" if group["protected"] else group["why"]["kind"]


def words_of(group: dict) -> set[str]:
    """The word of a group, and `told` if clients may have been told what a disaster would undo."""
    return {word_of(group)} | ({"told"} if group["told"] else set())
