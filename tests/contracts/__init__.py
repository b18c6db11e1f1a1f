"""What every kernel must do, written once. Each tier runs these tests on its own kernels:

    from contracts import forward, suite

    TestForward = suite(forward)

So tests/sim/test_contract.py::TestForward::test_x is test_x of tests/contracts/forward.py, with the fixtures of
tests/sim.
"""


def suite(contract):
    """A class that pytest collects: all tests of one module of this folder."""
    tests = {name: staticmethod(test) for name, test in vars(contract).items() if name.startswith("test_")}
    assert tests, f"{contract.__name__} has no tests"
    return type(contract.__name__, (), tests)
