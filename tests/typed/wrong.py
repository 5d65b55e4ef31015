"""Each of these lines is an error, and a type checker says so."""

import cgt


@cgt.jit
def scaled(x: float, by: int = 2) -> float:
    return x * by


def wrong() -> None:
    scaled("x")  # an argument's type
    scaled(1.0, too="much")  # a name
    scaled(1.0).upper()  # the result's type
    cgt.jit(3)  # no function
    cgt.jit(scaled, max_records="8")  # an option's type
    print(cgt.stats(scaled).replay)  # a name of a counter
