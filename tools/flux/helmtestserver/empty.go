// Package helmtestserver replaces a package that only tests of source-controller use, and that the module proxy does not have. Without it,
// go mod tidy fails.
package helmtestserver
