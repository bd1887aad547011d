// Package docs contains the documentation. Its tests check that the documents name only code, tests, files and headings
// that exist, and that their language is plain.
package docs
