"""docs/parity.md says what the tests found."""

from tests.integration import parity
from tests.integration.combinations import all_cases


def test_the_page_says_what_the_tests_found(found):
    parity.save(found)
    page = parity.PAGE.read_text()
    stale = [line for case in found if (line := parity.line(case, found[case])) not in page]
    assert not stale, f"run `{parity.WRITE}`"
    if found.keys() == set(all_cases()):
        assert page == parity.render(found), f"run `{parity.WRITE}`"
