package csr

import (
	"context"
	"errors"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// The time of a reconcile ends it, however many requests the API server of the cluster has.
func TestAnswerEndsWithItsTime(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	answer := func() error {
		return (&Reconciler{}).answer(ctx, client.ObjectKey{}, nil, &certificatesv1.CertificateSigningRequest{}, Cluster{})
	}
	if err := answer(); err != nil {
		t.Error(err)
	}
	cancel()
	if err := answer(); !errors.Is(err, context.Canceled) {
		t.Errorf("found %v, expected the end of the context", err)
	}
}
