// What runs inside ns-3: nodes, links and messages from standard input, arrivals in us to standard output.
//
//   FRAME WINDOW (bytes)
//   NODES LINKS MESSAGES
//   a b GB/s us                            for each link, both directions
//   source target bytes n first ... n-th   for each message, which waits for n earlier ones
//
// Every message is a TCP connection. TCP is a transport with a fixed window here: it neither starts slowly nor delays
// acknowledgements, and links hold packets back where queues are fair (ns-3's usual FQ-CoDel above four packets).

#include <cstdio>
#include <iostream>
#include <vector>

#include "ns3/bulk-send-application.h"
#include "ns3/core-module.h"
#include "ns3/data-rate.h"
#include "ns3/inet-socket-address.h"
#include "ns3/internet-stack-helper.h"
#include "ns3/ipv4-address-helper.h"
#include "ns3/ipv4-global-routing-helper.h"
#include "ns3/node-container.h"
#include "ns3/packet-sink.h"
#include "ns3/point-to-point-helper.h"
#include "ns3/tcp-socket-factory.h"

using namespace ns3;

struct Message {
  int source, target;
  uint64_t bytes, arrived;
  int waits;
  std::vector<int> followers;
  double end;
};

static const unsigned HEADERS = 52;  // of IP and TCP, with the time stamps that TCP sends
static unsigned frame, window;
static std::vector<Message> messages;
static std::vector<Ptr<Node>> nodes;
static std::vector<Ipv4Address> addresses;

static void start(int i);

static void received(int i, Ptr<const Packet> packet, const Address&) {
  Message& m = messages[i];
  m.arrived += packet->GetSize();
  if (m.arrived < m.bytes || m.end >= 0) return;
  m.end = Simulator::Now().GetNanoSeconds() / 1e3;
  for (int f : m.followers)
    if (--messages[f].waits == 0) start(f);
}

static void start(int i) {
  Message& m = messages[i];
  Ptr<BulkSendApplication> app = CreateObject<BulkSendApplication>();
  app->SetAttribute("Protocol", TypeIdValue(TcpSocketFactory::GetTypeId()));
  app->SetAttribute("Remote", AddressValue(InetSocketAddress(addresses[m.target], 1000 + i)));
  app->SetAttribute("MaxBytes", UintegerValue(m.bytes));
  app->SetAttribute("SendSize", UintegerValue(frame - HEADERS));
  nodes[m.source]->AddApplication(app);
}

static void settings() {
  Config::SetDefault("ns3::TcpSocket::SegmentSize", UintegerValue(frame - HEADERS));
  Config::SetDefault("ns3::TcpSocket::InitialCwnd", UintegerValue(window / frame));
  Config::SetDefault("ns3::TcpSocket::SndBufSize", UintegerValue(window));
  Config::SetDefault("ns3::TcpSocket::RcvBufSize", UintegerValue(window));
  Config::SetDefault("ns3::TcpSocket::DelAckCount", UintegerValue(1));
}

static void link(int a, int b, double gbps, double us, int index) {
  PointToPointHelper helper;
  helper.SetDeviceAttribute("DataRate", DataRateValue(DataRate(uint64_t(gbps * 8e9))));
  helper.SetDeviceAttribute("Mtu", UintegerValue(frame));
  helper.SetChannelAttribute("Delay", TimeValue(NanoSeconds(int64_t(us * 1e3))));
  helper.SetQueue("ns3::DropTailQueue<Packet>", "MaxSize", StringValue("4p"));
  NetDeviceContainer ends = helper.Install(nodes[a], nodes[b]);
  Ipv4AddressHelper range(Ipv4Address((10u << 24) + (index << 2)), Ipv4Mask("255.255.255.252"));
  Ipv4InterfaceContainer made = range.Assign(ends);
  addresses[a] = made.GetAddress(0);
  addresses[b] = made.GetAddress(1);
}

int main() {
  int hosts, links, count;
  std::cin >> frame >> window >> hosts >> links >> count;
  settings();
  NodeContainer all;
  all.Create(hosts);
  InternetStackHelper().Install(all);
  for (int i = 0; i < hosts; i++) nodes.push_back(all.Get(i));
  addresses.resize(hosts);
  for (int i = 0; i < links; i++) {
    int a, b;
    double gbps, us;
    std::cin >> a >> b >> gbps >> us;
    link(a, b, gbps, us, i);
  }
  messages.resize(count, {0, 0, 0, 0, 0, {}, -1.0});
  for (int i = 0; i < count; i++) {
    Message& m = messages[i];
    std::cin >> m.source >> m.target >> m.bytes >> m.waits;
    for (int j = 0, first; j < m.waits; j++) {
      std::cin >> first;
      messages[first].followers.push_back(i);
    }
  }
  Ipv4GlobalRoutingHelper::PopulateRoutingTables();
  for (int i = 0; i < count; i++) {
    Ptr<PacketSink> sink = CreateObject<PacketSink>();
    sink->SetAttribute("Protocol", TypeIdValue(TcpSocketFactory::GetTypeId()));
    sink->SetAttribute("Local", AddressValue(InetSocketAddress(Ipv4Address::GetAny(), 1000 + i)));
    sink->TraceConnectWithoutContext("Rx", MakeBoundCallback(&received, i));
    nodes[messages[i].target]->AddApplication(sink);
    if (messages[i].waits == 0) Simulator::Schedule(NanoSeconds(1), &start, i);
  }
  Simulator::Run();
  for (const Message& m : messages) std::printf("%.4f\n", m.end);
}
