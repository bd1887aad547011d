package hostclient

import (
	"context"
	"fmt"
	"strings"
	"time"

	grpccredentials "google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/credentials"
)

// loadCredentials reads the Secret of a host. They are empty for a unix socket, whose file permissions say who may
// connect.
func loadCredentials(ctx context.Context, secrets client.Reader, host *infrav1.CapstanHost) (credentials.Client, error) {
	if local(host.Spec.Address) {
		return credentials.Client{}, nil
	}
	ref := host.Spec.CredentialsRef
	secret := &corev1.Secret{}
	if err := secrets.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, secret); err != nil {
		return credentials.Client{}, fmt.Errorf("cannot read the credentials of host %s: %w", host.Name, err)
	}
	c, err := credentials.FromSecret(secret.Data)
	if err == nil {
		_, err = c.Transport(time.Now())
	}
	if err != nil {
		return credentials.Client{}, fmt.Errorf("secret %s/%s with the credentials of host %s: %w", ref.Namespace, ref.Name, host.Name, err)
	}
	return c, nil
}

func local(address string) bool { return strings.HasPrefix(address, "unix:") }

func transport(address string, c credentials.Client) (grpccredentials.TransportCredentials, error) {
	if local(address) {
		return insecure.NewCredentials(), nil
	}
	return c.Transport(time.Now())
}
