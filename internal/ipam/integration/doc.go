// Package integration tests the IPAM provider with a real API server. It contains only tests.
package integration
