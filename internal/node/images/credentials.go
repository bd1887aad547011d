package images

import (
	"encoding/json"
	"fmt"
	"io"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	credentialproviderv1 "k8s.io/kubelet/pkg/apis/credentialprovider/v1"

	"capstan.dev/capstan/internal/node/nodeconfig"
)

// maxRequest bounds a request of the kubelet in bytes. It contains the name of an image.
const maxRequest = 1 << 20

// Credentials answers a request of the kubelet for the credentials of an image, as one of its credential provider plugins. The kubelet
// does not keep the answer, so other credentials apply at once.
func Credentials(in io.Reader, out io.Writer, config *nodeconfig.NodeConfiguration) error {
	var request credentialproviderv1.CredentialProviderRequest
	if err := json.NewDecoder(io.LimitReader(in, maxRequest)).Decode(&request); err != nil {
		return fmt.Errorf("expected a CredentialProviderRequest of a kubelet: %w", err)
	}
	if want := credentialproviderv1.SchemeGroupVersion.String(); request.APIVersion != want || request.Image == "" {
		return fmt.Errorf("expected a CredentialProviderRequest %s with an image, found %s with image %q", want, request.APIVersion, request.Image)
	}
	response := credentialproviderv1.CredentialProviderResponse{
		TypeMeta:      metav1.TypeMeta{APIVersion: request.APIVersion, Kind: "CredentialProviderResponse"},
		CacheKeyType:  credentialproviderv1.RegistryPluginCacheKeyType,
		CacheDuration: &metav1.Duration{},
		Auth:          map[string]credentialproviderv1.AuthConfig{},
	}
	if r, found := config.CredentialsOf(request.Image); found {
		response.Auth[r.Host] = credentialproviderv1.AuthConfig{Username: r.Username, Password: r.Password}
	}
	return json.NewEncoder(out).Encode(response)
}
