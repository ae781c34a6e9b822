"""The pages of the site: built, opened, written and checked."""
