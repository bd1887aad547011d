package machineaccess

import (
	"context"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/request/headerrequest"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes"
)

// frontProxyConfigMap is the ConfigMap in which every API server publishes its proof that it forwards a request.
const frontProxyConfigMap = "extension-apiserver-authentication"

// frontProxy authenticates requests that the API server of the management cluster forwards. The API server proves itself with
// its client certificate, and names the caller in headers. Other requests have no caller: tokens are not accepted, because
// clients have no reason to come here directly.
type frontProxy struct {
	authority     *dynamiccertificates.ConfigMapCAController
	headers       *headerrequest.RequestHeaderAuthRequestController
	authenticator authenticator.Request
}

// newFrontProxy returns an authenticator that follows the ConfigMap once it is started. Until then no request has a caller.
func newFrontProxy(c kubernetes.Interface) (*frontProxy, error) {
	authority, err := dynamiccertificates.NewDynamicCAFromConfigMapController("front-proxy", metav1.NamespaceSystem, frontProxyConfigMap, "requestheader-client-ca-file", c)
	if err != nil {
		return nil, err
	}
	headers := headerrequest.NewRequestHeaderAuthRequestController(frontProxyConfigMap, metav1.NamespaceSystem, c,
		"requestheader-username-headers", "requestheader-uid-headers", "requestheader-group-headers",
		"requestheader-extra-headers-prefix", "requestheader-allowed-names")
	value := func(f func() []string) headerrequest.StringSliceProvider {
		return headerrequest.StringSliceProviderFunc(f)
	}
	return &frontProxy{authority: authority, headers: headers, authenticator: headerrequest.NewDynamicVerifyOptionsSecure(
		authority.VerifyOptions, value(headers.AllowedClientNames), value(headers.UsernameHeaders), value(headers.UIDHeaders),
		value(headers.GroupHeaders), value(headers.ExtraHeaderPrefixes))}, nil
}

// AuthenticateRequest implements authenticator.Request.
func (f *frontProxy) AuthenticateRequest(r *http.Request) (*authenticator.Response, bool, error) {
	return f.authenticator.AuthenticateRequest(r)
}

// NeedLeaderElection is false, because each replica serves.
func (*frontProxy) NeedLeaderElection() bool { return false }

// Start follows the ConfigMap until ctx is done.
func (f *frontProxy) Start(ctx context.Context) error {
	go f.authority.Run(ctx, 1)
	f.headers.Run(ctx, 1)
	return nil
}
