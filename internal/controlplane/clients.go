package controlplane

import "sigs.k8s.io/controller-runtime/pkg/client"

// clients of the management cluster.
type clients struct {
	// Client reads from the cache, except for Secrets, and writes.
	Client client.Client
	// LiveClient reads from the API server.
	LiveClient client.Client
	// SecretClient reads Secrets with the cluster-name label from the cache.
	SecretClient client.Client
}
