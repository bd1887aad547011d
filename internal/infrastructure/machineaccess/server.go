// Package machineaccess serves the logs and shells of machines, and loads images into them, for users of the management cluster: the API of package
// accessapi. The API server of the management cluster authenticates the users and forwards their requests. Each replica of the
// manager serves, leader or not.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package machineaccess

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/accessapi"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/reconciling"
)

// +kubebuilder:rbac:groups="",resources=configmaps,resourceNames=extension-apiserver-authentication,verbs=get;list;watch
// +kubebuilder:rbac:groups=authorization.k8s.io,resources=subjectaccessreviews,verbs=create

// Limits of one replica.
const (
	// maxStreams is the number of logs, shells and archives at the same time, maxUserStreams that of one user, and maxNamespaceStreams that
	// to the machines of one namespace: a tenant can make users.
	maxStreams, maxUserStreams, maxNamespaceStreams = 128, 16, 64
	// maxDuration is the longest time that a stream stays open.
	maxDuration = 12 * time.Hour
	// connectTimeout bounds the questions before a stream starts.
	connectTimeout = 20 * time.Second
)

// Server is the handler of the API.
type Server struct {
	// Authenticator returns the caller of a request.
	Authenticator authenticator.Request
	// Client reviews the rights of callers.
	Client client.Client
	// Reader reads machines, hosts and credentials, live: a replica that does not lead has no connections to hosts, and a
	// stream starts rarely.
	Reader client.Reader
	// Inbound are the connections of hosts that dial. Only the leader has some.
	Inbound *connections.Inbound
	// Recorder writes an event of the machine for each shell and each archive.
	Recorder events.EventRecorder
	// MaxImageBytes is the largest size of an image archive.
	MaxImageBytes int64
	// Stopped ends all streams when it is done.
	Stopped context.Context

	streams streams
}

// SetupWithManager adds the API to the server of the webhooks, which has a certificate and a Service.
func SetupWithManager(ctx context.Context, mgr ctrl.Manager, inbound *connections.Inbound, maxImageBytes int64) error {
	clientset, err := kubernetes.NewForConfigAndClient(mgr.GetConfig(), mgr.GetHTTPClient())
	if err != nil {
		return err
	}
	proxy, err := newFrontProxy(clientset)
	if err != nil {
		return err
	}
	if err := mgr.Add(proxy); err != nil {
		return err
	}
	s := &Server{
		Authenticator: proxy, Client: mgr.GetClient(), Reader: mgr.GetAPIReader(), Inbound: inbound,
		Recorder: reconciling.EventRecorder(mgr, "capstanmachine-access"), MaxImageBytes: maxImageBytes, Stopped: ctx,
	}
	mgr.GetWebhookServer().Register(accessapi.Root(), s)
	mgr.GetWebhookServer().Register(accessapi.Root()+"/", s)
	return nil
}

// request is a request for a subresource of a machine.
type request struct {
	namespace, name, subresource string
	verb                         string
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := s.serve(w, r); err != nil {
		writeError(w, err)
	}
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) error {
	caller, err := s.caller(r)
	if err != nil {
		return err
	}
	if strings.TrimSuffix(r.URL.Path, "/") == accessapi.Root() {
		return writeJSON(w, http.StatusOK, accessapi.Discovery())
	}
	req, err := parse(r)
	if err != nil {
		return err
	}
	if err := s.authorize(r.Context(), caller, req); err != nil {
		return err
	}
	release, ok := s.streams.take(caller.GetName(), req.namespace)
	if !ok {
		return apierrors.NewTooManyRequests("too many logs, shells and uploads are open: close some, or try again later", 10)
	}
	defer release()
	ctx, cancel := context.WithTimeout(r.Context(), maxDuration)
	defer cancel()
	defer context.AfterFunc(s.Stopped, cancel)()
	return s.stream(ctx, w, r, caller, req)
}

// stream serves the subresource of a machine whose caller has the right to it.
func (s *Server) stream(ctx context.Context, w http.ResponseWriter, r *http.Request, caller user.Info, req request) error {
	switch req.subresource {
	case accessapi.Log:
		return s.log(ctx, w, r, caller, req)
	case accessapi.Images:
		return s.images(ctx, w, r, caller, req)
	}
	return s.exec(ctx, w, r, caller, req)
}

// caller returns the user who sent the request to the API server. The API server sends its own requests as system:kube-aggregator.
func (s *Server) caller(r *http.Request) (user.Info, error) {
	response, ok, err := s.Authenticator.AuthenticateRequest(r)
	if err != nil || !ok || response.User.GetName() == "" {
		if err != nil {
			ctrl.LoggerFrom(r.Context()).Info("Refused a request without a verified caller", "remote", r.RemoteAddr, "reason", err.Error())
		}
		return nil, apierrors.NewUnauthorized("expected a request that the API server of the management cluster forwards, with its client certificate; found none")
	}
	return response.User, nil
}

// parse returns the machine, the subresource and the verb of a request. The verb of a shell is always create: a WebSocket starts with GET,
// and a role that reads all resources must not open shells.
func parse(r *http.Request) (request, error) {
	rest, found := strings.CutPrefix(r.URL.Path, accessapi.Root()+"/namespaces/")
	parts := strings.Split(rest, "/")
	if !found || len(parts) < 4 {
		return request{}, unknownPath(r.URL.Path)
	}
	q := request{namespace: parts[0], name: parts[2], subresource: parts[len(parts)-1]}
	if r.URL.Path != accessapi.Path(q.namespace, q.name, q.subresource) || len(validation.IsDNS1123Label(q.namespace)) > 0 || len(validation.IsDNS1123Subdomain(q.name)) > 0 {
		return request{}, unknownPath(r.URL.Path)
	}
	methods, known := map[string][]string{
		accessapi.Log: {http.MethodGet}, accessapi.Exec: {http.MethodGet, http.MethodPost}, accessapi.Images: {http.MethodPost},
	}[q.subresource]
	if !known {
		return request{}, unknownPath(r.URL.Path)
	}
	if !slices.Contains(methods, r.Method) {
		return request{}, apierrors.NewMethodNotSupported(accessapi.GroupVersion.WithResource(accessapi.Resource+"/"+q.subresource).GroupResource(), r.Method)
	}
	if q.verb = "create"; q.subresource == accessapi.Log {
		q.verb = "get"
	}
	return q, nil
}

func unknownPath(path string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound,
		Message: "expected " + accessapi.Path("NAMESPACE", "NAME", "log, exec or proxy/images") + ", found " + path[:min(len(path), 200)],
	}}
}

// authorize asks the API server whether the caller has the right. Before it forwards a request, the API server checks the verb of the HTTP
// method. This check also refuses a shell that begins with GET if the caller has no verb create, and a request that another client with
// the front proxy's certificate has forwarded for a caller without the right.
func (s *Server) authorize(ctx context.Context, caller user.Info, q request) error {
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: caller.GetName(), UID: caller.GetUID(), Groups: caller.GetGroups(), Extra: map[string]authorizationv1.ExtraValue{},
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Namespace: q.namespace, Name: q.name, Verb: q.verb,
			Group: accessapi.GroupVersion.Group, Version: accessapi.GroupVersion.Version, Resource: accessapi.Resource, Subresource: q.subresource,
		},
	}}
	for key, values := range caller.GetExtra() {
		review.Spec.Extra[key] = values
	}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	if err := s.Client.Create(ctx, review); err != nil {
		return apierrors.NewInternalError(err)
	}
	if review.Status.Allowed && !review.Status.Denied {
		return nil
	}
	resource := accessapi.GroupVersion.WithResource(accessapi.Resource + "/" + q.subresource).GroupResource()
	return apierrors.NewForbidden(resource, q.name, errNoRight{caller.GetName(), q})
}

type errNoRight struct {
	caller string
	request
}

func (e errNoRight) Error() string {
	return "user " + e.caller + " needs the verb " + e.verb + " in namespace " + e.namespace
}

// writeError answers with the Status of an error. Other errors state no detail.
func writeError(w http.ResponseWriter, err error) {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		status = apierrors.NewInternalError(err)
	}
	content := status.Status()
	content.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	_ = writeJSON(w, int(content.Code), content)
}

func writeJSON(w http.ResponseWriter, code int, content any) error {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	return json.NewEncoder(w).Encode(content)
}
