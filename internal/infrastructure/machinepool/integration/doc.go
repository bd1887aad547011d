// Package integration tests machine pools with a real API server, the real manager of Cluster API core, the
// infrastructure provider, and hollow hosts whose machines register Nodes. It contains only tests.
package integration
