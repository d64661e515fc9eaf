"""The browser of the tests of pages."""

from tests.tools.report.conftest import browser as browser
