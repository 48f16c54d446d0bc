from tests.draw_policy import PAGE, page


def test_the_page_shows_the_table_as_it_is():
    assert PAGE.read_text("utf-8") == page(), "run: python tests/draw_policy.py"
