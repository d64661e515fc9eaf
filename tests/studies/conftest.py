"""The browser of the tests of pages."""

from tests.train.report.conftest import browser as browser
